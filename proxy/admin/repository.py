"""Sign-ins to the page that were ended before their cookies expire."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from proxy.database.tables import SignOutRow


class SignOutRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def is_ended(self, sign_in: str) -> bool:
        found = self._connection.execute(select(SignOutRow.sign_in).where(SignOutRow.sign_in == sign_in))
        return found.one_or_none() is not None

    def end(self, sign_in: str, *, until: float, now: float) -> None:
        """Record a sign-out once; drop those whose cookies have expired."""
        self._connection.execute(delete(SignOutRow).where(SignOutRow.until < now))
        if not self.is_ended(sign_in):
            self._connection.execute(insert(SignOutRow).values(sign_in=sign_in, until=until))
