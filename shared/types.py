"""The few enumerations that both sides speak, and the one error that a peer can cause."""

from enum import Enum


class Tier(Enum):
    """Where a block lives."""

    DEVICE = 0
    HOST = 1


class FinishReason(Enum):
    """Why a sequence ended. The values are those of OpenAI's API where it has one."""

    STOP = "stop"  # a stop id, or a stop string found by the text layer
    LENGTH = "length"  # max_tokens, or the model's own length
    CANCELLED = "cancelled"  # the client left
    TIMEOUT = "timeout"  # the request's time ran out; what was generated until then stands
    ERROR = "error"  # the row failed on the worker, or no worker was left in time


class ProtocolError(Exception):
    """A peer sent what the protocol does not allow. Always the peer's fault, never a reason to stop."""


class LawBroken(Exception):
    """A bug in our own accounting: a law that must hold did not. Never caught to carry on as if nothing were."""
