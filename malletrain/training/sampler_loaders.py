"""The DataLoaders that iterate a sampler: who they are, the random numbers that they draw, and
whether they read the same samples as before a restart.

Decides which wrappers of a sampler are refused: those that misread its batches.

A loader draws one number from torch's generator, or from one of its own, each time it is iterated:
the seed of its workers. Decides which number a loader draws first in a new process, and which one
when it is iterated from the middle of an epoch. An uninterrupted epoch draws once, so the second
draw of a resumed epoch must leave torch's generator unchanged. The number must also differ from all
other draws of the run: otherwise the workers would repeat the random numbers of another part of the
training.

With a ``Subset`` from ``random_split`` without a seed, each start of the script draws another one,
and samples of the test set would become training samples unnoticed. Decides which subsets must be
equal: those of one epoch. A script may choose another subset for the next epoch, so a difference
between epochs is only reported.

torch is not imported here before a loader is used.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import rng
from malletrain.training.report import tell


def calling_object() -> Any:
    """Return the object whose method called ``iter()`` on the sampler; None if a plain function
    called it.
    """
    return _caller_variable("self")


def calling_loader() -> Any:
    """Return the DataLoader that called ``iter()`` on the sampler; None if another object did."""
    return _caller_variable("loader")


def _caller_variable(name: str) -> Any:
    """Return a variable of the function that called the function of the sampler."""
    frame = inspect.currentframe()
    try:
        for _ in range(3):
            frame = frame.f_back if frame else None
        return frame.f_locals.get(name) if frame else None
    finally:
        del frame  # breaks a reference cycle that would keep the loader's workers alive


def is_loader_iterator(caller: object) -> bool:
    """Whether ``caller`` is the iterator of a DataLoader, without importing torch."""
    return any(cls.__name__ == "_BaseDataLoaderIter" for cls in type(caller).__mro__)


def call_around_batches(
    iterator: Any, before_each: Callable[[], None], after_all: Callable[[], None]
) -> bool:
    """Call ``before_each`` each time a batch is requested from a DataLoader's iterator, and
    ``after_all`` when there is none left. Return False if the installed torch has no place for
    that.
    """
    from malletrain.training import step_hooks

    return step_hooks.call_around_batches(iterator, before_each, after_all)


def reject_wrapper(sampler: object, caller: object) -> None:
    """Raise TypeError if ``caller`` misinterprets the batches. torch's BatchSampler treats them as
    single samples, accelerate's BatchSamplerShard as batches of all ranks, and its SkipBatchSampler
    as the batches of a whole epoch.
    """
    names = {cls.__name__ for cls in type(caller).__mro__}
    if "SkipBatchSampler" in names and getattr(caller, "skip_batches", None) != 0:
        raise TypeError(
            "ElasticSampler begins at the first sample that was not trained on, so that "
            "skip_first_batches() would skip the same batches twice. Use the loader as it is."
        )
    if "BatchSamplerShard" in names:
        raise TypeError(
            "ElasticSampler yields only this rank's share, and accelerator.prepare(loader) would "
            "split it again. Use the loader as it is: leave it out of prepare()."
        )
    if "BatchSampler" in names and getattr(caller, "sampler", None) is sampler:
        raise TypeError(
            "ElasticSampler yields whole batches, but the DataLoader was given it as sampler=. "
            "Write DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle and "
            "drop_last."
        )


class LoaderSeeds:
    """The numbers that the loaders of one sampler draw."""

    def __init__(self) -> None:
        self._saved: Any = None
        """State of torch's generator before a loader drew from it in the middle of an epoch."""
        self._samples_at_seed: int | None = None
        """Number of samples done when a loader's own generator was seeded; None before that."""

    def begin(self, generator: Any, samples_done: int) -> None:
        """Seed a loader's own generator before its first use in a resumed training, because no
        snapshot includes its state. Call it until this process has made a step: a script may look
        at a batch before it restores its snapshot.

        Args:
            generator: the loader's own; None if it has none.
            samples_done: number of samples that were trained on before.
        """
        if generator is not None and samples_done not in (0, self._samples_at_seed):
            self._samples_at_seed = samples_done
            rng.branch(samples_done, generator)

    def resume(self, position: int) -> None:
        """A loader is iterated from ``position`` of the epoch: save the state of torch's generator,
        and let the loader draw a number that follows from both.
        """
        import torch

        self._saved = torch.get_rng_state()
        rng.branch(position)

    def restore(self) -> None:
        """The loader has drawn: set torch's generator to the saved state, if there is one."""
        if self._saved is not None:
            import torch

            torch.set_rng_state(self._saved)
            self._saved = None

    def forget(self) -> None:
        """Drop the saved state."""
        self._saved = None


_SEED_ADVICE = (
    "The script runs again at each change of nodes, so its random choice of samples needs a seed: "
    "random_split(data, sizes, generator=torch.Generator().manual_seed(0))."
)


class SubsetCheck:
    """The subsets that the loaders of one sampler read."""

    def __init__(self) -> None:
        self._newest = ""
        """Fingerprint of the newest subset; empty if there is none."""
        self._epoch = -1
        """Epoch in which it was read."""
        self._loaded = False
        """Whether the newest one comes from a loaded state, and no loader has read since."""

    def state(self) -> dict[str, Any]:
        """Return the entries for the sampler's state; none without a subset."""
        if not self._newest:
            return {}
        return {
            "subset": self._newest,
            "subset_epoch": self._epoch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the entries of a sampler's state."""
        self._newest = str(state.get("subset", ""))
        self._epoch = int(state.get("subset_epoch", -1))
        self._loaded = bool(self._newest)

    def read(self, dataset: Any, epoch: int) -> None:
        """Note that a loader is about to read ``dataset`` in ``epoch``.

        Raises:
            ValueError: the loaded state has another subset for this epoch.
        """
        if epoch == self._epoch and not self._loaded:
            return
        own, loaded, self._loaded = fingerprint(dataset), self._loaded, False
        if loaded and own != self._newest:
            if self._epoch == epoch:
                raise ValueError(
                    "The training set is another Subset than before the restart: the job would "
                    f"train on samples that it may have set aside for tests. {_SEED_ADVICE}"
                )
            tell(
                "The training set is another Subset than in the epoch before the restart. "
                f"{_SEED_ADVICE}",
                once="another subset",
            )
        self._newest, self._epoch = own, epoch


def fingerprint(dataset: Any) -> str:
    """Return a hash of the samples that a ``torch.utils.data.Subset`` chooses, which may itself
    contain a Subset; empty for any other dataset.
    """
    sha, depth = hashlib.sha256(), 0
    while _is_subset(type(dataset)):
        for number in _indices(dataset):
            sha.update(number)
        dataset, depth = dataset.dataset, depth + 1
    return sha.hexdigest() if depth else ""


def _is_subset(kind: type) -> bool:
    return any(
        cls.__name__ == "Subset" and cls.__module__.startswith("torch.utils.data")
        for cls in kind.__mro__
    )


def _indices(subset: Any) -> tuple[bytes, ...]:
    import torch

    try:
        numbers = torch.as_tensor(subset.indices, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):  # indices of another kind, such as names
        return (repr(subset.indices).encode(),)
    return (numbers.numpy().tobytes(), b".")
