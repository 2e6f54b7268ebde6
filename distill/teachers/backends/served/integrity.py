"""Checksums of what goes over the wire: an answer is whole, and it is the answer to the request that was sent.

    x-distill-checksum: XXH3 (128 bits) of the answer's body
    x-distill-question: XXH3 of the request as the server received it: path and query, a zero byte, body

TCP's own checksum misses one damaged packet in 65,536, and sees nothing of what happens inside the machines between; a
proxy may mix up two answers of the same shape. XXH3 hashes at the speed of memory and is no signature: against an
attacker there is TLS.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

CHECKSUM = "x-distill-checksum"
QUESTION = "x-distill-question"


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the XXH3 of a body in parts, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def question_hash(target: str, body: bytes) -> str:
    """Return the XXH3 of a request.

    Args:
        target: path and query, without a prefix that a proxy takes off.
        body: empty where there is none.
    """
    return checksum((target.encode(), b"\0", body))


def damage_of(sums: tuple[str | None, str | None], status: int, question: str, body: memoryview) -> str | None:
    """Return how an answer was damaged on the way, or that it answers another request; None where it is sound.

    Args:
        sums: Request hash and body checksum from the response's headers; None for a header that is absent.
        status: HTTP status. Only responses of 200 must carry both sums: others may come from a proxy.
        question: Hash of the request that was sent.
        body: Response body.
    """
    asked, told = sums
    if status == 200 and (asked is None or told is None):
        return "a response without checksums: install the same version of distill on both sides"
    if asked is not None and asked != question:
        return f"a response to another request: expected {question}, got {asked:.40}"
    if told is not None and told != (found := checksum([body])):
        return f"a damaged response: expected the checksum {told:.40}, got {found}"
    return None
