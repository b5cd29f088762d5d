"""The methods with one field as their result: bicubic interpolation, SRCNN, ESRGAN, and WindSR's
own U-Net with the mean square error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from windsr.method import Draw, FineCase, Method, Network
from windsr.networks import Critic, RegressionUnet, Rrdb, Srcnn
from windsr.patches import Scales
from windsr.presets import Preset

CRITIC_WEIGHT = 5e-3
"""Weight of the critic in the generator's loss (Wang et al. 2018, eq. 3)."""


class Bicubic(Method):
    """Only interpolation."""

    name = "bicubic"

    def _predict(self, case: FineCase, draw: Draw, net: Any) -> torch.Tensor:
        return case.base.clamp_min(0.0)


class SrcnnMethod(Method):
    """SRCNN with the mean square error."""

    name = "srcnn"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Srcnn(preset, 1 + self._grounds)}

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        case = self._case_of(batch)
        prediction = nets["net"](self._condition(case.base, case.terrain, case.unit))
        target = self._target(batch["truth"], case.base, case.unit)
        return {"net": functional.mse_loss(prediction.float(), target)}

    def _predict(self, case: FineCase, draw: Draw, net: Any) -> torch.Tensor:
        prediction = net(self._condition(case.base, case.terrain, case.unit)).float()
        return self._speed(prediction, case.base, case.unit)


class UnetMethod(SrcnnMethod):
    """WindSR's U-Net as a regression: the mean of the distribution that the diffusion draws from,
    and the basis of ``windsr-edm``.
    """

    name = "unet"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        Method.__init__(self, preset, scales, terrain)
        self.nets = {"net": RegressionUnet(preset, 1 + self._grounds)}


class Esrgan(Method):
    """ESRGAN without its perceptual loss, whose network was trained on photographs. The critic
    compares each true field with the field made from its own coarse field (a relativistic GAN with
    pairs, Jolicoeur-Martineau 2018), so that the loss of a sample does not depend on the other
    samples on its node.
    """

    name = "esrgan"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Rrdb(preset, self._grounds), "critic": Critic(preset)}

    def _made(self, case: FineCase, net: Any) -> torch.Tensor:
        ground = self._ground(case.terrain)
        low = self._low(case.low, case.unit)
        fine: torch.Tensor = net(low, torch.cat(ground, dim=1) if ground else None).float()
        return fine

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        case = self._case_of(batch)
        target = self._target(batch["truth"], case.base, case.unit)
        generated = self._made(case, nets["net"])
        critic = nets["critic"]
        real = critic(target)
        return {
            "net": functional.l1_loss(generated, target)
            + CRITIC_WEIGHT * functional.softplus(real.detach() - critic(generated)).mean(),
            "critic": functional.softplus(critic(generated.detach()) - real).mean(),
        }

    def _predict(self, case: FineCase, draw: Draw, net: Any) -> torch.Tensor:
        return self._speed(self._made(case, net), case.base, case.unit)
