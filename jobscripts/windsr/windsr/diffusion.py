"""The methods with random members: WindSR as published, and diffusion of the residual of a
regression.

``windsr``: a conditional denoising diffusion model (SR3, Saharia et al. 2021) with diffusers'
schedulers. ``windsr-edm``: a regression gives the mean, and a diffusion model with the
preconditioning of Karras et al. 2022 (EDM, arXiv 2206.00364) draws the residual, as CorrDiff does
(Mardani et al. 2023, arXiv 2309.15214).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from windsr import WindsrError
from windsr.fields import Fields
from windsr.grids import block_mean
from windsr.method import Draw, FineCase, Method, Network, mix
from windsr.networks import Denoiser, RegressionUnet, ResidualDenoiser
from windsr.patches import Scales, unit_of
from windsr.presets import Preset

MAX_PREDICTION = 8.0
"""Maximum of a prediction while denoising, standard deviations: no real field exceeds it."""
SIGMA_DATA, SIGMA_MIN, SIGMA_MAX = 0.5, 0.01, 20.0
"""EDM: standard deviation of the data, and the first and last noise of sampling. Karras et al. use
0.002 to 80; the residual has no long waves, which would need so much.
"""
SIGMA_LOG_MEAN, SIGMA_LOG_STD = -1.2, 1.2
"""EDM: mean and deviation of the logarithm of the noise in training (Karras et al. 2022, table 1).
"""
NOISE_INPUT_FACTOR = 400.0
"""Factor on c_noise = ln σ / 4 for the U-Net, whose input for the noise level is meant for 0 to
1000.
"""
MEASURED_FIELDS = 16
"""Number of training fields from which the size of the residual is measured."""


class Windsr(Method):
    """The diffusion model as published. A preset may make it predict the residual of
    interpolation.
    """

    name = "windsr"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Denoiser(preset, 1 + self._grounds)}
        self._training_noise = self._scheduler("ddpm")

    def _scheduler(self, kind: str) -> Any:
        import diffusers.schedulers as schedulers

        common: dict[str, Any] = {
            "num_train_timesteps": self.preset.noise_levels,
            "prediction_type": self.preset.prediction,
            "timestep_spacing": "trailing",
        }
        if self.preset.betas is None:
            common["beta_schedule"] = "squaredcos_cap_v2"
        else:
            first, last = self.preset.betas
            common |= {"beta_schedule": "linear", "beta_start": first, "beta_end": last}
        clip = {"clip_sample": True, "clip_sample_range": MAX_PREDICTION}
        if kind == "ddim":
            return schedulers.DDIMScheduler(**common, **clip)
        if kind == "ddpm":
            return schedulers.DDPMScheduler(**common, **clip)
        if kind == "dpm":
            return schedulers.DPMSolverMultistepScheduler(**common)
        raise WindsrError(f"There is no scheduler {kind!r}; there are ddim, ddpm, dpm.")

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        case = self._case_of(batch)
        target = self._target(batch["truth"], case.base, case.unit)
        noise, level = batch["noise"], batch["level"]
        noisy = self._training_noise.add_noise(target, noise, level)
        expected = (
            noise
            if self.preset.prediction == "epsilon"
            else self._training_noise.get_velocity(target, noise, level)
        )
        prediction = nets["net"](noisy, self._condition(case.base, case.terrain, case.unit), level)
        return {"net": functional.mse_loss(prediction.float(), expected)}

    def _noise_input(self, level: torch.Tensor) -> torch.Tensor:
        """Return the network's input for the noise level."""
        return level

    def _start(self, case: FineCase) -> torch.Tensor:
        """Return the fine field that is subtracted from the truth to get the target, m/s."""
        return case.base

    def _noised(
        self, scheduler: Any, target: torch.Tensor, noise: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Return ``target`` with the noise of the next step; without noise after the last."""
        levels = scheduler.timesteps
        if step + 1 >= len(levels):
            return target
        noised: torch.Tensor = scheduler.add_noise(
            target, noise, levels[step + 1].expand(len(target))
        )
        return noised

    def _predict(self, case: FineCase, draw: Draw, net: Any) -> torch.Tensor:
        members, device = draw.members, case.low.device
        scheduler = self._scheduler(draw.scheduler)
        scheduler.set_timesteps(draw.steps or self.preset.sample_steps, device=device)
        generators = [
            torch.Generator().manual_seed(mix(draw.seed, seed, member))
            for seed in case.seeds
            for member in range(members)
        ]
        start = self._start(case)
        condition = self._condition(case.base, case.terrain, case.unit)
        condition = condition.repeat_interleave(members, dim=0)
        shape = (1, 1, *case.base.shape[-2:])

        def noise() -> torch.Tensor:
            return torch.cat(
                [torch.randn(shape, generator=generator) for generator in generators]
            ).to(device)

        goal = mask = None
        if case.fixed_pixels is not None:
            goal = self._target(case.fixed_pixels.values, start, case.unit)
            goal = goal.repeat_interleave(members, dim=0)
            mask = case.fixed_pixels.mask.repeat_interleave(members, dim=0)
        x = (
            noise() if case.noise is None else case.noise.flatten(0, 1)[:, None].to(device)
        ) * scheduler.init_noise_sigma
        extra = {} if draw.scheduler == "dpm" else {"generator": generators}
        for k, level in enumerate(scheduler.timesteps):

            def denoise(noisy: torch.Tensor, level: Any = level) -> torch.Tensor:
                noise_input = self._noise_input(level).expand(len(noisy)).to(device)
                prediction: torch.Tensor = net(
                    scheduler.scale_model_input(noisy, level), condition, noise_input
                ).float()
                return prediction

            if case.guidance is None:
                x = scheduler.step(denoise(x), level, x, **extra).prev_sample
            else:
                x = self._guided(case, start, scheduler, denoise, x, k)
            if goal is not None and mask is not None:
                # the fixed pixels follow the noise levels of the observations
                observed = self._noised(scheduler, goal, noise(), k)
                x = mask * observed + (1 - mask) * x
        speed = self._speed(
            x,
            start.repeat_interleave(members, dim=0),
            case.unit.repeat_interleave(members, dim=0),
        )
        return speed.reshape(len(case.low), members, *case.base.shape[-2:])

    def _guided(
        self, case: FineCase, start: torch.Tensor, scheduler: Any, denoise: Any, x: Any, step: int
    ) -> torch.Tensor:
        raise WindsrError(
            f"{self.name} cannot be guided by observations; the method windsr-edm can."
        )


class WindsrEdm(Windsr):
    """Diffusion of the residual of a regression: the regression gives the members' mean, the
    diffusion their spread. The noise levels are EDM's; the unit of the target is ``SIGMA_DATA``
    times the size of the residual in training.
    """

    name = "windsr-edm"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        if preset.target != "residual":
            raise WindsrError(
                f"{self.name} draws what a regression lacks; a preset that predicts the field "
                f"itself, such as {preset.name!r}, is for the method windsr."
            )
        self.nets = {"net": ResidualDenoiser(preset, 1 + self._grounds)}
        self.frozen = {"mean": RegressionUnet(preset, 1 + self._grounds)}
        self._ready = False

    def build_on(self, mean: Method) -> None:
        """Use the regression's network, scales and channels of terrain. Raises WindsrError if
        ``mean`` is of another method or size.
        """
        if mean.name != "unet":
            raise WindsrError(
                f"{self.name} builds on a model of the method unet; --mean gives one of "
                f"{mean.name}."
            )
        try:
            self.frozen["mean"].load_state_dict(mean.nets["net"].state_dict())
        except RuntimeError:
            raise WindsrError(
                f"The model of --mean has another size (preset {mean.preset.name!r}, terrain "
                f"{mean.terrain}) than this one (preset {self.preset.name!r}, terrain "
                f"{self.terrain}); train both alike."
            ) from None
        theirs, own = mean.scales.to_dict(), self.scales.to_dict()
        if any(abs(theirs[key] - own[key]) > 1e-3 * abs(own[key]) for key in own):
            raise WindsrError(
                "The model of --mean was trained on other days or fields than these; train both on "
                "the same ones, so that no test day is known to either."
            )
        self.frozen["mean"].eval()
        self._ready = True

    def prepare(self, fields: Fields) -> None:
        """Measure the size of the regression's residual on the training days."""
        if not self._ready:
            raise WindsrError(
                f"{self.name} draws what a regression lacks: train one first (--method unet), and "
                "give its model with --mean."
            )
        factor = self.preset.factor
        measured = range(0, len(fields.times), max(1, len(fields.times) // MEASURED_FIELDS))
        rows, columns = (n // self._multiple * self._multiple for n in fields.terrain.shape)
        squares = []
        terrain = torch.tensor(fields.terrain[None, None, :rows, :columns])
        for k in measured:
            truth = torch.tensor(fields.wind[k][None, None, :rows, :columns])
            low = block_mean(truth, factor)
            base, unit = self._interpolated(low), unit_of(low, self.preset.relative)
            with torch.no_grad():
                prediction = self.frozen["mean"](self._condition(base, terrain, unit))
            squares.append(float(((super()._target(truth, base, unit) - prediction) ** 2).mean()))
        net = self.nets["net"]
        assert isinstance(net, ResidualDenoiser)
        net.size.fill_(max(sum(squares) / len(squares), 1e-6) ** 0.5)

    def _size(self) -> torch.Tensor:
        net = self.nets["net"]
        assert isinstance(net, ResidualDenoiser)
        return net.size / SIGMA_DATA

    def _start(self, case: FineCase) -> torch.Tensor:
        prediction = self.frozen["mean"](
            self._condition(case.base, case.terrain, case.unit)
        ).float()
        start: torch.Tensor = case.base + prediction * case.unit * self.scales.residual_std
        return start

    def _target(self, truth: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return super()._target(truth, base, unit) / self._size()

    def _speed(self, target: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return super()._speed(target * self._size(), base, unit)

    def _scheduler(self, kind: str) -> Any:
        import diffusers.schedulers as schedulers

        common = {
            "sigma_data": SIGMA_DATA,
            "sigma_min": SIGMA_MIN,
            "sigma_max": SIGMA_MAX,
        }
        if kind in ("ddim", "ddpm"):  # both schedulers are Euler's step here, without added noise
            return schedulers.EDMEulerScheduler(**common)
        if kind == "dpm":
            return schedulers.EDMDPMSolverMultistepScheduler(**common)
        raise WindsrError(f"There is no scheduler {kind!r}; there are ddim, ddpm, dpm.")

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        case = self._case_of(batch)
        with torch.no_grad():
            start = self._start(case)
        target = self._target(batch["truth"], start, case.unit)
        share = (batch["level"].float() + 0.5) / self.preset.noise_levels
        log_sigma = SIGMA_LOG_MEAN + SIGMA_LOG_STD * torch.special.ndtri(share)
        sigma = log_sigma.exp().reshape(-1, 1, 1, 1)
        noisy = target + sigma * batch["noise"]
        noise = self._training_noise
        # The target of the preconditioned network has variance 1 at every level, so that EDM's
        # weight λ(σ) times c_out² is 1 (Karras et al. 2022, eq. 8).
        c_skip = SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2)
        c_out = sigma * SIGMA_DATA / (sigma**2 + SIGMA_DATA**2) ** 0.5
        prediction = nets["net"](
            noise.precondition_inputs(noisy, sigma),
            self._condition(case.base, case.terrain, case.unit),
            self._noise_input(noise.precondition_noise(sigma.flatten())),
        )
        return {"net": functional.mse_loss(prediction.float(), (target - c_skip * noisy) / c_out)}

    def _noise_input(self, level: torch.Tensor) -> torch.Tensor:
        return level * NOISE_INPUT_FACTOR

    def _noised(
        self, scheduler: Any, target: torch.Tensor, noise: torch.Tensor, step: int
    ) -> torch.Tensor:
        noised: torch.Tensor = target + scheduler.sigmas[step + 1].to(target.device) * noise
        return noised

    def _guided(
        self, case: FineCase, start: torch.Tensor, scheduler: Any, denoise: Any, x: Any, step: int
    ) -> torch.Tensor:
        """Make one Euler step along the score of the field given the observations: by Bayes' rule,
        the model's score plus the gradient of the likelihood of the observations at the denoised
        field.
        """
        guidance = case.guidance
        assert guidance is not None
        members = len(x) // len(case.low)
        goal = self._target(guidance.values, start, case.unit).repeat_interleave(members, dim=0)
        mask = guidance.mask.repeat_interleave(members, dim=0)
        one = case.unit.repeat_interleave(members, dim=0) * self.scales.residual_std
        error = guidance.error / (one * self._size())
        sigma, after = (scheduler.sigmas[k].to(x.device) for k in (step, step + 1))
        with torch.enable_grad():
            noisy = x.detach().requires_grad_()
            clean = scheduler.precondition_outputs(noisy, denoise(noisy), sigma)
            missed = mask * (goal - clean)
            # variance of the denoised field around the truth, under a normal distribution
            unsure = (sigma * SIGMA_DATA) ** 2 / (sigma**2 + SIGMA_DATA**2)
            likelihood = -0.5 * (missed**2 / (error**2 + guidance.looseness * unsure)).sum()
            (pull,) = torch.autograd.grad(likelihood, noisy)
        denoised = clean.detach() + sigma**2 * pull
        stepped: torch.Tensor = x + (after - sigma) * (x - denoised) / sigma
        return stepped
