"""Rows of ended sign-ins: visitors who signed out before their cookie expired."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from proxy.database.tables import SignOutRow


class SignOutRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def is_ended(self, sign_in: str) -> bool:
        found = self._connection.execute(select(SignOutRow.sign_in).where(SignOutRow.sign_in == sign_in))
        return found.one_or_none() is not None

    def end(self, sign_in: str, *, until: float, now: float) -> None:
        """Record that a sign-in ended; a second call for the same sign-in changes nothing."""
        # A cookie that has expired is refused anyway, so its row has no more use.
        self._connection.execute(delete(SignOutRow).where(SignOutRow.until < now))
        if not self.is_ended(sign_in):
            self._connection.execute(insert(SignOutRow).values(sign_in=sign_in, until=until))
