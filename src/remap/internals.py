# SPDX-License-Identifier: Apache-2.0
"""From the public handle of a tenant to what this library itself knows of it. Loads nothing; doubles of a tenant pass it too.

It is the contract with the engines of `remap_serve`, which is of the same release: beside `Tenant` and `tenant.kv` they use what
is named here and nothing else (tests/serve/test_internals.py). It holds within a release, and for no other engines. The engine's
thread asks, while the tenant is attached. A star: some fields are read, so it may be asked for each request or pass.

Of `internals(tenant)` (`remap.tenant.Internals`):

    session *           the session, as long as it holds the tenant; a tenant keeps it alive
    layer_bytes *       bytes of each layer, without the embedding part; they never change
    targets *           (ttft_s, tbt_s) that it was attached with
    buffers *           ring buffers in use, 0 while nothing is streamed
    lent_pages *        pages of its layers that are free for other tenants, or are their KV
    cold *              the layers without pages, ascending: activation brings them home
    away_pages          pages that its activation brings home: lent ones, and those of cold layers
    reload_s            seconds in which the link brings them, by what was measured; 0 if none is away
    computed *          the layers that its passes compute, a range: all, but for `advanced.place`
    elsewhere           the layers that another instance holds, ascending
    ready               whether one layer's bytes are all there and stay, so that `wait` would not wait
    stats               what was copied and waited for since attach; the numbers never fall
    copy_seconds        seconds to copy in a mean layer, as measured; 0 before the link was
    streamed_seconds    seconds to copy in one layer's part of so many streamed blocks; 0 before the link was measured
    kv *                its whole KV cache, as below

Of `internals(tenant).kv` (`remap.kv.cache.TenantKV`): what schedulers take of `tenant.kv` and of its `host` as one object,
and some more:

    spec, max_blocks, block_tokens *                    as attached
    tensors, allocate, free                             of `tenant.kv`; free takes streamed blocks too
    usable_blocks, free_blocks, live_blocks *           of `tenant.kv`; what others change, they change between passes
    holds, holds_host                                   whether all of these are in use; to ask behind an interrupt
    copy_out, copy_in, kept, arrived, join, free_host   of `tenant.kv.host`
    stream, streamable_blocks, free_streamable_blocks   of `tenant.kv.host`; how many of those below are free
    open_host, offer                                    of `tenant.kv.host`: `open`, and `offer`
    host                                                its books: total, free_blocks, live_ids
    pool                                                the books of blocks: live_ids; open_ids, live or free
    geometry                                            where blocks lie: unit_bytes, pages_for_blocks
    scratch                                             ids of the scratch blocks; layer i's part is the engine's in layer i
    copied_out_bytes, copied_in_bytes *                 of KV, to host memory and back, since attach
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remap.tenant import Internals, Tenant

__all__ = ["internals"]

_PLACE = "_internals"


def internals(tenant: Tenant) -> Internals:
    """The tenant as this library itself sees it (see `Internals`). A simulation's or test's double of a tenant is its own."""
    given: Any = tenant
    found: Internals = getattr(given, _PLACE, given)
    return found
