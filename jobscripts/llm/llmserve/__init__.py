"""LLM inference on idle nodes: requests that survive the loss of their nodes, and fair scheduling.
What is exported here is pure: it runs in the gateway, on a leased node or in a simulation.
"""

from llmserve.dispatcher import Dispatcher
from llmserve.generation import (
    Command,
    DeliverTokens,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    RequestRefusal,
    StopAttempt,
)
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState, RequestState

__version__ = "0.1.0"
__all__ = [
    "Capacity",
    "Command",
    "DeliverTokens",
    "Dispatcher",
    "EndRequest",
    "FinishReason",
    "GenerationRequest",
    "PostAttempt",
    "ReplicaState",
    "RequestRefusal",
    "RequestState",
    "StopAttempt",
    "__version__",
]
