"""The rights of a key: its kind says what its holder may do, its scope in which runs.

A key for one run has a `run_id`, a key for a project a `project_id`, and a key for the whole installation neither.
A run outside the scope is unknown to the key: callers answer 404, as for a run that does not exist. Everything here
is pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from proxy.contract.identifiers import KeyId, RunId, SessionId
from proxy.errors import NotFound, PermissionDenied
from proxy.settings import UsageLimits


class PrincipalKind(StrEnum):
    """The kinds of keys.

    `admin` may do everything but call models. `project` may do everything in the runs of its project. `run` is for
    the agents of one run, `session` for one session. `trainer` is for claims and versions of one run, of a project or
    of every run. `viewer` reads the runs of a project or all runs, and changes nothing. `reviewer` reads the sessions
    of a run or a project and sends feedback about them, and does nothing else.
    """

    ADMIN = "admin"
    PROJECT = "project"
    RUN = "run"
    SESSION = "session"
    TRAINER = "trainer"
    VIEWER = "viewer"
    REVIEWER = "reviewer"


class Limiter(msgspec.Struct, frozen=True, kw_only=True):
    """The key whose limits bind another one and count its calls: for the key of a session the key that opened the
    session, for one made by a rotation the one rotated first, and otherwise itself."""

    key_id: KeyId
    name: str | None
    limits: UsageLimits | None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key. Only session keys have a `session_id`."""

    kind: PrincipalKind
    key_id: KeyId
    run_id: RunId | None
    session_id: SessionId | None
    project_id: str | None = None
    limiter: Limiter | None = None

    @property
    def limited_as(self) -> KeyId:
        """The id under which calls with this key, and with the keys of sessions that it opens, are counted."""
        return self.key_id if self.limiter is None else self.limiter.key_id


class Right(StrEnum):
    """Something that a key may be allowed to do, within its scope."""

    LIST = "list runs"
    READ = "read a run's sessions, turns, rewards, steps and curves"
    READ_SESSION = "read a session"
    READ_TRAINING = "read a run's claims, versions and exports"
    CALL = "call models and open sessions"
    REWARD = "send rewards"
    PREFER = "send preferences"
    TRAIN = "claim trajectories and commit versions"
    PAUSE = "pause a run"
    CHANGE = "create, change, archive and delete runs, their keys and their data"
    OPEN_PAGE = "sign in to the admin page"
    SEE_PROJECT = "read a project"
    WATCH = "read the health of the installation"
    ADMINISTRATE = "administrate the installation"


_ADMIN, _PROJECT, _RUN = PrincipalKind.ADMIN, PrincipalKind.PROJECT, PrincipalKind.RUN
_SESSION, _TRAINER, _VIEWER = PrincipalKind.SESSION, PrincipalKind.TRAINER, PrincipalKind.VIEWER
_REVIEWER = PrincipalKind.REVIEWER

KINDS: dict[Right, tuple[PrincipalKind, ...]] = {
    Right.LIST: (_ADMIN, _PROJECT, _RUN, _TRAINER, _VIEWER),
    Right.READ: (_ADMIN, _PROJECT, _RUN, _VIEWER),
    Right.READ_SESSION: (_ADMIN, _PROJECT, _RUN, _SESSION, _VIEWER, _REVIEWER),
    Right.READ_TRAINING: (_ADMIN, _PROJECT, _TRAINER, _VIEWER),
    Right.CALL: (_PROJECT, _RUN, _SESSION),
    Right.REWARD: (_ADMIN, _PROJECT, _RUN, _SESSION, _REVIEWER),
    Right.PREFER: (_ADMIN, _PROJECT, _RUN, _REVIEWER),
    Right.TRAIN: (_ADMIN, _PROJECT, _TRAINER),
    Right.PAUSE: (_ADMIN, _PROJECT, _TRAINER),
    Right.CHANGE: (_ADMIN, _PROJECT),
    Right.OPEN_PAGE: (_ADMIN, _PROJECT, _RUN, _VIEWER, _REVIEWER),
    Right.SEE_PROJECT: (_ADMIN, _PROJECT, _VIEWER),
    Right.WATCH: (_ADMIN, _VIEWER),
    Right.ADMINISTRATE: (_ADMIN,),
}
"""The kinds of keys that have each right."""

# Rights over the installation as a whole: a key whose scope is narrower has none of them.
_WHOLE = frozenset({Right.WATCH, Right.ADMINISTRATE})


class OwnedRun(Protocol):
    """A run, with the project that it belongs to."""

    @property
    def id(self) -> str: ...

    @property
    def project_id(self) -> str: ...


def has_right(who: Principal, right: Right) -> bool:
    """Return whether the key has a right at all, in the runs of its scope."""
    return who.kind in KINDS[right] and (right not in _WHOLE or not is_scoped(who))


def require_right(who: Principal, right: Right) -> None:
    """Raise PermissionDenied if keys of this kind or scope do not have the right."""
    if has_right(who, right):
        return
    if who.kind in KINDS[right]:
        raise PermissionDenied(
            f"this {who.kind.value} key is for one project; to {right.value}, use one for all runs"
        )
    wanted = " or ".join(kind.value for kind in KINDS[right])
    raise PermissionDenied(f"this needs a key of kind {wanted}, but yours is of kind {who.kind.value}")


def is_scoped(who: Principal) -> bool:
    """Return whether the key is for one run or one project."""
    return who.run_id is not None or who.project_id is not None


def covers(who: Principal, run: OwnedRun) -> bool:
    """Return whether the run is in the key's scope."""
    if who.run_id is not None:
        return who.run_id == run.id
    return who.project_id is None or who.project_id == run.project_id


def covers_session(who: Principal, run: OwnedRun, session_id: str) -> bool:
    """Return whether a session of the run is in the key's scope."""
    return covers(who, run) and who.session_id in (None, session_id)


def may(who: Principal, right: Right, run: OwnedRun) -> bool:
    """Return whether the key has the right in this run."""
    return has_right(who, right) and covers(who, run)


def may_see(who: Principal, run: OwnedRun) -> bool:
    """Return whether the key may read the run."""
    return may(who, Right.READ, run)


def may_act(who: Principal, run: OwnedRun) -> bool:
    """Return whether the key may call the run's model."""
    return may(who, Right.CALL, run)


def may_change(who: Principal, run: OwnedRun) -> bool:
    """Return whether the key may change the run."""
    return may(who, Right.CHANGE, run)


def may_administrate(who: Principal) -> bool:
    """Return whether the key may change projects, engines and the keys of everybody."""
    return has_right(who, Right.ADMINISTRATE)


def may_manage_key(who: Principal, kind: PrincipalKind, *, project_id: str | None) -> bool:
    """Return whether `who` may create, rotate and revoke keys of `kind` in a project (None: for all runs).

    A project key manages the keys that its people need, and not other project keys: whoever got hold of it must not
    be able to outlast its revocation with the same rights.
    """
    if who.kind is PrincipalKind.ADMIN:
        return True
    managed = kind in (_RUN, _SESSION, _TRAINER, _VIEWER, _REVIEWER)
    return who.kind is PrincipalKind.PROJECT and managed and project_id is not None and project_id == who.project_id


def require_run(who: Principal, right: Right, run: OwnedRun, name: str) -> None:
    """Raise PermissionDenied without the right, NotFound if the run, called `name`, is out of scope."""
    require_right(who, right)
    if not covers(who, run):
        raise unknown_run(name)


def unknown_run(name: str, *, param: str | None = None) -> NotFound:
    """Return the error for a run that does not exist or that the key may not know of."""
    return NotFound(f"there is no run {name!r}", param=param)
