"""Checksum of what goes over the wire: an answer is whole, and it is the answer to the request that was sent.

    x-distill-exchange: XXH3 (128 bits) of the request as the server received it (path, query, body) and of the answer

The client computes it from the request that it has sent and the answer that it has received, so that one sum sees a
damaged request, a damaged answer, and a proxy that mixes up two answers of the same shape. TCP's own checksum misses
one damaged packet in 65,536, and sees nothing of what happens inside the machines between. XXH3 hashes at the speed of
memory and is no signature: against an attacker there is TLS.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

CHECKSUM = "x-distill-exchange"


def checksum(target: str, body: bytes, answer: Iterable[bytes | memoryview]) -> str:
    """Return the XXH3 of a request and its answer, 32 hexadecimal digits.

    Args:
        target: path and query, without a prefix that a proxy takes off.
        body: the request's body; empty where there is none.
        answer: parts of the answer's body.
    """
    digest = xxhash.xxh3_128()
    # the lengths, so that no byte can change sides
    digest.update(f"{len(target)} {len(body)} {target}".encode())
    digest.update(body)
    for part in answer:
        digest.update(part)
    return digest.hexdigest()


def checksum_error(told: str | None, status: int, target: str, body: bytes, answer: memoryview) -> str | None:
    """Return how an exchange was damaged on the way, or that it answers another request; None where it is right.

    Args:
        told: Checksum in the response's headers; None where there is none.
        status: HTTP status. Only responses of 200 must carry a checksum: others may come from a proxy.
        target: Path and query of the request that was sent; `body`, its body.
        answer: Body that was received.
    """
    if told is None:
        return (
            None
            if status != 200
            else ("a response without a checksum: install the same version of distill on both sides")
        )
    found = checksum(target, body, [answer])
    if told != found:
        return f"a damaged response, or one to another request: expected the checksum {told:.40}, got {found}"
    return None
