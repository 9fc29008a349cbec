"""Why requests could not be served, kept until who asked wants to know."""

from collections import OrderedDict

from vllm.logger import init_logger

from .options import Asked
from .sessions import Sessions

logger = init_logger(__name__)

#: Requests of which it is remembered.
MOST = 256
#: Statuses of HTTP, for those who ask over it: what a request asks cannot be, is not there, was replaced, goes beyond a
#: limit, went wrong, or finds no room now.
BAD, MISSING, REPLACED, LIMITED, FAILED, FULL = 400, 404, 409, 429, 500, 503


class Refusals:
    """By a request's token, or by its session where it has none.

    Args:
        sessions: Whose statistics count them.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._of: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def note(self, asked: Asked, status: int, why: str) -> None:
        logger.error("GateSight: session %r: %s", asked.session_id, why)
        self.forget(asked)
        self._of[asked.token or asked.session_id] = status, why.removesuffix(".")
        while len(self._of) > MOST:
            self._of.popitem(last=False)
        self._sessions.stats.add(refusals=1)

    def forget(self, asked: Asked) -> tuple[int, str] | tuple[None, None]:
        """Status and reason, which are then forgotten."""
        return self._of.pop(asked.token or asked.session_id, (None, None))
