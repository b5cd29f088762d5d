"""The methods' interface: shapes, units, seeds, and what is held fast while denoising."""

from __future__ import annotations

import pytest
import torch
from windsr import WindsrError
from windsr.grids import bicubic
from windsr.methods import Draw, HeldPixels, make
from windsr.patches import Scales
from windsr.presets import PRESETS, preset_of

SCALES = Scales(6.0, 2.0, 0.5, 200.0, 20.0)


def inputs(count: int):
    generator = torch.Generator().manual_seed(5)
    return 6 + torch.rand((count, 1, 4, 4), generator=generator), 300 * torch.rand(
        (count, 1, 16, 16), generator=generator
    )


@pytest.fixture(scope="module")
def windsr():
    torch.manual_seed(0)
    return make("windsr", PRESETS["tiny"], SCALES, True)


@pytest.mark.parametrize("name", ["bicubic", "srcnn", "esrgan"])
@pytest.mark.parametrize("terrain", [False, True])
def test_every_method_gives_speeds_on_the_fine_grid(name, terrain):
    torch.manual_seed(0)
    method = make(name, PRESETS["tiny"], SCALES, terrain)
    low, height = inputs(3)
    made = method.predict(low, height, [1, 2, 3], Draw())
    assert made.shape == (3, 1, 16, 16)
    assert (made >= 0).all()
    blind = method.predict(low, height + 500, [1, 2, 3], Draw())
    assert torch.equal(made, blind) == (not terrain or name == "bicubic")


@pytest.mark.parametrize("scheduler", ["ddim", "ddpm", "dpm"])
def test_members_follow_from_their_seeds_alone(windsr, scheduler):
    low, height = inputs(3)
    draw = Draw(members=2, steps=3, scheduler=scheduler)
    together = windsr.predict(low, height, [7, 8, 9], draw)
    assert together.shape == (3, 2, 16, 16)
    torch.testing.assert_close(
        windsr.predict(low[1:2], height[1:2], [8], draw), together[1:2], atol=1e-3, rtol=0
    )
    assert not torch.allclose(together[:, 0], together[:, 1], atol=1e-2)


def test_the_noise_to_begin_with_can_be_given(windsr):
    low, height = inputs(2)
    noise = torch.randn((2, 2, 16, 16), generator=torch.Generator().manual_seed(1))
    one, other = (
        windsr.predict(low, height, seeds, Draw(members=2, steps=2), noise=noise)
        for seeds in ([1, 2], [3, 4])
    )
    torch.testing.assert_close(one, other)
    assert not torch.allclose(one[:, 0], one[:, 1], atol=1e-2)


def test_what_is_held_fast_comes_out_as_it_is(windsr):
    low, height = inputs(1)
    mask, values = torch.zeros(1, 1, 16, 16), torch.full((1, 1, 16, 16), 9.0)
    mask[..., 4:8, 4:8] = 1
    draw = Draw(members=2, steps=3)
    made = windsr.predict(low, height, [1], draw, held=HeldPixels(mask, values))
    torch.testing.assert_close(
        made[..., 4:8, 4:8], torch.full((1, 2, 4, 4), 9.0), atol=1e-4, rtol=0
    )
    free = windsr.predict(low, height, [1], draw, held=HeldPixels(torch.zeros_like(mask), values))
    torch.testing.assert_close(free, windsr.predict(low, height, [1], draw))


def test_a_network_that_says_nothing_leaves_the_interpolation():
    method = make("srcnn", PRESETS["tiny"], SCALES, False)
    for parameter in method.nets["net"].parameters():
        torch.nn.init.zeros_(parameter)
    low, height = inputs(2)
    torch.testing.assert_close(
        method.predict(low, height, [1, 2], Draw())[:, 0:1], bicubic(low, 4).clamp_min(0)
    )


def test_the_published_sizes():
    paper = preset_of("paper")
    assert (paper.patch // paper.factor, paper.patch) == (16, 128)
    assert (paper.target, paper.prediction) == ("field", "epsilon")


def test_unknown_names_are_refused(windsr):
    with pytest.raises(WindsrError, match="bicubic, srcnn, esrgan, windsr"):
        make("magic", PRESETS["tiny"], SCALES, True)
    with pytest.raises(WindsrError, match="paper, gpu, cpu, tiny"):
        preset_of("huge")
    low, height = inputs(1)
    with pytest.raises(WindsrError, match="ddim, ddpm, dpm"):
        windsr.predict(low, height, [1], Draw(scheduler="magic"))
    with pytest.raises(WindsrError, match="nothing to train"):
        make("bicubic", PRESETS["tiny"], SCALES, True).losses({}, {})
