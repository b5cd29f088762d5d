"""The tables of the benchmark of WindSR."""

from __future__ import annotations

from benchmarks.windsr_tables import methods_table


def test_a_folder_of_results_may_lack_scores_that_came_later():
    """It was begun with a version that did not record the MAE, and goes on."""
    scores = {"rmse": 0.3, "psnr": 36.0, "ssim": 0.9, "crps": 0.2}
    rows = [
        {"row": name, "free": {"1": scores}, "constrained": {"1": scores | more}}
        for name, more in (("srcnn", {}), ("unet", {}), ("unet", {"mae": 0.2}))
    ]
    _, _, srcnn, unet, _ = methods_table(rows)
    assert srcnn == "| srcnn | 1 | 0.300 | 0.300 | - | 36.00 | 0.900 | 0.200 |"
    assert "| 0.200 | 36.00 ± 0.00 |" in unet
