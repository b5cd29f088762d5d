"""The methods' interface: shapes, units, seeds, and what is held fast while denoising."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from windsr import WindsrError
from windsr.grids import block_mean, interpolate
from windsr.methods import Draw, FixedPixels, Guidance, make
from windsr.patches import Scales
from windsr.presets import PRESETS, as_published, preset_of

from tests.jobscripts.windsr import scripts

SCALES = Scales(1.0, 0.4, 0.1, 200.0, 20.0)
TINY = PRESETS["tiny"]


def inputs(count: int):
    generator = torch.Generator().manual_seed(5)
    return 6 + torch.rand((count, 1, 4, 4), generator=generator), 300 * torch.rand(
        (count, 1, 16, 16), generator=generator
    )


@pytest.fixture(scope="module")
def windsr():
    torch.manual_seed(0)
    return make("windsr", TINY, SCALES, True)


@pytest.fixture(scope="module")
def edm():
    """Untrained, its network says nothing: what it draws is then known exactly."""
    torch.manual_seed(0)
    method = make("windsr-edm", TINY, SCALES, True)
    method.nets["net"].size.fill_(2.0)
    return method


@pytest.mark.parametrize("name", ["bicubic", "srcnn", "esrgan", "unet"])
@pytest.mark.parametrize("terrain", [False, True])
def test_every_method_gives_speeds_on_the_fine_grid(name, terrain):
    torch.manual_seed(0)
    method = make(name, TINY, SCALES, terrain)
    low, height = inputs(3)
    if name == "unet":
        torch.nn.init.normal_(method.nets["net"].net.conv_out.weight)
    made = method.predict(low, height, [1, 2, 3], Draw())
    assert made.shape == (3, 1, 16, 16)
    assert (made >= 0).all()
    torch.testing.assert_close(block_mean(made, 4), low)
    blind = method.predict(low, height + 500, [1, 2, 3], Draw())
    assert torch.equal(made, blind) == (not terrain or name == "bicubic")


@pytest.mark.parametrize(
    "scheduler",
    [
        "ddpm",
        pytest.param("ddim", marks=pytest.mark.thorough),
        pytest.param("dpm", marks=pytest.mark.thorough),
    ],
)
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
    draw = Draw(members=2, steps=3, constrain=False)
    made = windsr.predict(low, height, [1], draw, fixed_pixels=FixedPixels(mask, values))
    torch.testing.assert_close(
        made[..., 4:8, 4:8], torch.full((1, 2, 4, 4), 9.0), atol=1e-4, rtol=0
    )
    free = windsr.predict(
        low, height, [1], draw, fixed_pixels=FixedPixels(torch.zeros_like(mask), values)
    )
    torch.testing.assert_close(free, windsr.predict(low, height, [1], draw))


def test_a_network_that_says_nothing_leaves_the_interpolation():
    method = make("srcnn", TINY, SCALES, False)
    for parameter in method.nets["net"].parameters():
        torch.nn.init.zeros_(parameter)
    low, height = inputs(2)
    torch.testing.assert_close(
        method.predict(low, height, [1, 2], Draw())[:, 0:1],
        interpolate(low, 4, True),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("name", ["srcnn", "esrgan", "unet", "windsr"])
def test_twice_the_wind_gives_twice_the_detail(name):
    """Wind is seen relative to its coarse mean, so a day that blows harder is nothing new."""
    torch.manual_seed(0)
    method = make(name, TINY, SCALES, True)
    low, height = inputs(2)
    one, two = (
        method.predict(k * low, height, [1, 2], Draw(members=2, steps=2)) for k in (1.0, 2.0)
    )
    torch.testing.assert_close(two, 2 * one, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["bicubic", "srcnn", "esrgan", "unet", "windsr-edm"])
def test_a_composite_takes_the_place_of_the_interpolated_field(name):
    torch.manual_seed(0)
    method = make(name, TINY, SCALES, True)
    low, height = inputs(2)
    base = interpolate(low, 4, True)
    draw = Draw(steps=2, seed=3)
    plain = method.predict(low, height, [1, 2], draw)
    torch.testing.assert_close(
        method.predict(low, height, [1, 2], draw, base=base), plain, atol=1e-4, rtol=1e-4
    )
    base = base.clone()
    base[..., 4:8, 4:8] += 2.0
    made = method.predict(low, height, [1, 2], draw, base=base)
    torch.testing.assert_close(block_mean(made, 4), block_mean(base, 4)[:, [0]])
    assert (made - plain)[..., 4:8, 4:8].mean() > 1.5


def test_what_a_regression_lacks_is_drawn_as_wide_as_it_was_measured(edm):
    """A network that says nothing denoises white noise of the data's width exactly, so members
    must spread by that width around the regression: size × residual × the coarse mean.
    """
    low, height = torch.full((1, 1, 4, 4), 50.0), torch.zeros(1, 1, 16, 16)
    draw = Draw(members=24, steps=16, scheduler="dpm", constrain=False)
    members = edm.predict(low, height, [1], draw)[0]
    assert float(members.mean()) == pytest.approx(50.0, abs=0.5)
    assert float(members.std(dim=0).mean()) == pytest.approx(2.0 * 0.1 * 50, rel=0.05)


@pytest.mark.thorough
def test_observations_pull_members_as_far_as_bayes_rule_says(edm):
    """Prior N(50, 10²) at each pixel, an observation of 70 ± 10: posterior N(60, 50)."""
    low, height = torch.full((1, 1, 4, 4), 50.0), torch.zeros(1, 1, 16, 16)
    mask, values = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)
    mask[..., ::4, ::4], values[..., ::4, ::4] = 1, 70.0
    draw = Draw(members=32, steps=24, constrain=False)
    pull = Guidance(mask, values, error=10.0)
    made = edm.predict(low, height, [1], draw, guidance=pull)[0]
    at = mask[0, 0].bool()
    assert float(made[:, at].mean()) == pytest.approx(60.0, abs=1.5)
    assert float(made[:, ~at].mean()) == pytest.approx(50.0, abs=0.7)
    with pytest.raises(WindsrError, match="windsr cannot be guided"):
        make("windsr", TINY, SCALES, True).predict(low, height, [1], draw, guidance=pull)


def test_a_regression_of_another_kind_size_or_day_is_refused(edm):
    with pytest.raises(WindsrError, match="method unet; --mean gives one of srcnn"):
        edm.build_on(make("srcnn", TINY, SCALES, True))
    wider = dataclasses.replace(TINY, channels=(16, 16))
    with pytest.raises(WindsrError, match="another size"):
        edm.build_on(make("unet", wider, SCALES, True))
    windier = dataclasses.replace(SCALES, wind_max=30.0)
    with pytest.raises(WindsrError, match="other days or fields"):
        edm.build_on(make("unet", TINY, windier, True))
    with pytest.raises(WindsrError, match="builds on no other model"):
        make("windsr", TINY, SCALES, True).build_on(edm)
    with pytest.raises(WindsrError, match="train one first"):
        make("windsr-edm", TINY, SCALES, True).prepare(scripts.small())
    with pytest.raises(WindsrError, match="for the method windsr"):
        make("windsr-edm", as_published(TINY), SCALES, True)


def test_the_published_sizes():
    """SR3, Saharia et al. 2021, section 4 and appendix: 16 → 128."""
    paper = preset_of("paper")
    assert (paper.patch // paper.factor, paper.patch) == (16, 128)
    assert (paper.target, paper.prediction) == ("field", "epsilon")
    assert (paper.betas, paper.noise_levels, paper.dropout) == ((1e-6, 1e-2), 2000, 0.2)
    sides = [paper.patch // 2**level for level in range(len(paper.channels))]
    assert [s for s, a in zip(sides, paper.attention, strict=True) if a] == [16]
    assert (paper.relative, paper.constrained, paper.sea) == (False, False, False)


def test_unknown_names_are_refused(windsr):
    with pytest.raises(WindsrError, match="bicubic, srcnn, esrgan, unet, windsr, windsr-edm"):
        make("magic", TINY, SCALES, True)
    with pytest.raises(WindsrError, match="paper, gpu, cpu, tiny"):
        preset_of("huge")
    low, height = inputs(1)
    with pytest.raises(WindsrError, match="ddim, ddpm, dpm"):
        windsr.predict(low, height, [1], Draw(scheduler="magic"))
    with pytest.raises(WindsrError, match="nothing to train"):
        make("bicubic", TINY, SCALES, True).losses({}, {})
