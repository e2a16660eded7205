"""Ask a trainer to send a version that it offers."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
import msgspec

from proxy.contract.claim import MEDIA_TYPE, decode, encode
from proxy.contract.exchange import JOIN_PATH, Join, Offer, Place
from proxy.errors import EngineFailed

# The trainer opens a socket, and computes nothing for its answer.
_ANSWER_SECONDS = 10.0
_MOST_BYTES = 4096


class OfferOver(EngineFailed):
    """The trainer sends the version no longer: it is on the disk by now, or was withdrawn."""


async def join(offer: Offer, ranks: int) -> Place:
    """Return the group in which an engine of `ranks` processes gets the version.

    Raises OfferOver, and EngineFailed if the trainer does not answer.
    """
    body = encode(Join(token=offer.token, ranks=ranks))
    try:
        # Offers are rare, and each trainer listens at its own port: a client of its own keeps nothing open. Without
        # the environment's proxies, which would see the token.
        async with (
            httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client,
            client.stream(
                "POST", offer.url + JOIN_PATH, content=body, headers={"content-type": MEDIA_TYPE}
            ) as answer,
        ):
            content = b""
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MOST_BYTES:
                    raise EngineFailed("the trainer's answer about the weights that it offers is too long")
    except httpx.HTTPError as error:
        raise EngineFailed(f"the trainer does not answer at {offer.url}: {error or type(error).__name__}") from error
    if answer.status_code == HTTPStatus.GONE:
        raise OfferOver(content.decode(errors="replace"))
    if answer.status_code != HTTPStatus.OK:
        raise EngineFailed(content.decode(errors="replace"))
    try:
        place = decode(content, Place)
    except msgspec.DecodeError as error:
        raise EngineFailed(
            f"the trainer's answer about the weights that it offers cannot be read: {error}"
        ) from error
    # The offer's host was checked, and engines connect to no other one.
    if place.host != urlsplit(offer.url).hostname:
        raise EngineFailed(f"the trainer offers weights at {offer.url}, and names {place.host[:200]} to receive them")
    return place
