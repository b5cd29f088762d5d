"""The process of a batch on one node: a replica, which also dispatches while it is the elected
member.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.batch_input import BatchInput
from llmserve.batch_leader import BatchLeader
from llmserve.batch_store import BatchFolder, BatchFolderError, Epoch, Manifest
from llmserve.election import DispatcherSilence, should_dispatch
from llmserve.live_dispatcher import LiveDispatcher
from llmserve.model_tokenizer import tokenizer_of
from llmserve.policies import Fcfs
from llmserve.replica_process import ReplicaOptions, ReplicaProcess, first_view
from llmserve.text import Tokenizer
from malletrain import membership

POLL_S = 0.5
"""Seconds between two checks whether this process should dispatch, and whether the output is
complete.
"""


@dataclass(frozen=True)
class MemberOptions:
    """The options of a process of a batch."""

    output: Path
    replica: ReplicaOptions
    tokenizer: str
    """``simulated``, or the folder of a model."""
    worth: float
    """Value of a node while there is work for it, samples/s."""
    max_nodes: int


class BatchMember:
    """The process of a node.

    Args:
        options: its options.

    Raises:
        BatchFolderError: there is no batch, or its input has changed.
        ValueError: there is no tokenizer.
        OSError: the input cannot be read.
    """

    def __init__(self, options: MemberOptions) -> None:
        self._options = options
        self._folder = BatchFolder(options.output)
        manifest = self._folder.manifest()
        if manifest is None:
            raise BatchFolderError(f"{self._folder.path} has no batch; submit it first.")
        self._manifest: Manifest = manifest
        self._tokenizer: Tokenizer = tokenizer_of(options.tokenizer)
        self._requests: BatchInput | None = None
        self._silence = DispatcherSilence()

    async def run(self) -> None:
        """Serve until the output is complete.

        Raises:
            EngineNeverLoads: the engine does not start.
            BatchFolderError: the input has changed, or the folder is damaged.
            OSError: the folder cannot be used.
        """
        if self._folder.is_done:
            return
        async with ReplicaProcess(self._options.replica) as replica:
            serving = asyncio.create_task(replica.run())
            working = asyncio.create_task(self._work(replica.group))
            try:
                await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
                for task in (working, serving):
                    if task.done():
                        task.result()
            finally:
                for task in (working, serving):
                    task.cancel()
                await asyncio.gather(working, serving, return_exceptions=True)
                if self._requests is not None:
                    self._requests.close()

    async def _work(self, group: membership.Membership) -> None:
        """Dispatch whenever this process is elected; ends when the output is complete."""
        await first_view(group)
        while not await asyncio.to_thread(lambda: self._folder.is_done):
            epoch = await asyncio.to_thread(self._claim, group)
            if epoch is None:
                await asyncio.sleep(POLL_S)
            elif await self._dispatch(epoch, group):
                return

    def _claim(self, group: membership.Membership) -> Epoch | None:
        newest = self._folder.newest_epoch()
        owner, number = ("", 0) if newest is None else (newest.owner, newest.number)
        sign = (number, self._folder.status().get("at"))
        silent_s = self._silence.silent_s(sign, time.monotonic())
        if owner == group.me.address:
            owner = ""  # an earlier process at this port, or this process before it resigned
        if not should_dispatch(group.members, group.me, owner, silent_s):
            return None
        return self._folder.claim(group.me.address)

    async def _dispatch(self, epoch: Epoch, group: membership.Membership) -> bool:
        requests = await asyncio.to_thread(self._input)
        options = self._options
        print(f"dispatching {len(requests)} requests, epoch {epoch.number}", flush=True)
        async with LiveDispatcher(
            Fcfs(),
            self._tokenizer,
            self._manifest.name,
            key=membership.job_key(),
            max_request_tokens=options.replica.kv_tokens,
        ) as live:
            leader = BatchLeader(
                self._folder,
                epoch,
                self._manifest,
                requests,
                live,
                group,
                options.worth,
                options.max_nodes,
            )
            return await leader.run(lambda: _resigns(group.members, group.me))

    def _input(self) -> BatchInput:
        if self._requests is None:
            requests = BatchInput(Path(self._manifest.input))
            if requests.digest != self._manifest.digest:
                requests.close()
                raise BatchFolderError(
                    f"{requests.path} has changed since the batch was submitted. Restore it, or "
                    "submit the new input with another output."
                )
            self._requests = requests
        return self._requests


def _resigns(members: Sequence[membership.Member], me: membership.Member) -> bool:
    """Whether this process is leaving while another member stays."""
    is_leaving = any(member.leaving for member in members if member == me)
    return is_leaving and any(not member.leaving for member in members)
