"""How many blocks a pool gets: by the settings, or by what is spare. One rule for the worker and for the plan.

    spare      what a device has left once the weights are there
    workspace  what steps need of that
    room       spare, less a twentieth (allocators round, and others allocate too), less the workspace

A pool that does not fit raises SettingsError, which names the setting and a value that works.
"""

from kilburn.shared.kinds import Share, SizeOrShare
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.ledger import shown
from kilburn.shared.settings import SettingsError

HEADROOM = 0.95  # of the spare memory
OWN_SHARE = 0.9  # of the spare memory that a pool takes when nobody says how much: a device of its own ...
SHARED_SHARE = 0.25  # ... and memory that is everybody's


def blocks_in(budget_bytes: int, layout: KVLayout) -> int:
    """Whole blocks in a budget."""
    return max(budget_bytes, 0) // layout.bytes_per_block


def blocks_wanted(max_rows: int, max_len: int, block_size: int) -> int:
    """Blocks that every row could use at its full length: more serve the prefix cache only."""
    return max_rows * blocks_for(max_len, block_size)


def sized(
    layout: KVLayout, *, num_blocks: int, kv_memory: int, spare: int, share: float, workspace: int, wanted: int
) -> int:
    """Blocks of the device pool. `spare` is what the device has left after the weights, `workspace` what steps need.

    By count or by memory as the settings say, else `share` of what is spare, and no more than `wanted`. Raises
    SettingsError naming a value that works.
    """
    block = layout.bytes_per_block
    room = int(spare * HEADROOM) - workspace
    if num_blocks:
        setting, asked = "num_blocks", num_blocks
        works = str(room // block)
    elif kv_memory:
        setting, asked = "kv_memory", kv_memory // block
        works = f"{room // (1 << 20)}MiB"
        if not asked:
            raise SettingsError([f"--kv-memory: {shown(kv_memory)} holds no block; one takes {block} bytes, give more"])
    else:
        share_bytes = min(int(max(spare - workspace, 0) * share), room)
        setting, asked = "kv_memory", min(wanted, share_bytes // block)
        works = f"{room // (1 << 20)}MiB"
    flag = "--" + setting.replace("_", "-")
    if room < block:
        problem = f"{flag}: {shown(spare)} are spare and a step takes {shown(workspace)}, so that no block fits; "
        raise SettingsError([problem + "free memory, or lower --max-step-tokens, --max-rows or --block-size"])
    if asked * block > room:
        problem = (
            f"{flag}: a pool of {asked} blocks takes {shown(asked * block)} and does not fit; give {works} or less"
        )
        raise SettingsError([problem])
    return max(asked, 1)


def host_blocks(layout: KVLayout, host_pool: int | Share, spare: int, total: int) -> int:
    """Blocks of the host pool, which is a size or a share of the host's `total` memory. Raises SettingsError."""
    block, spare = layout.bytes_per_block, max(spare, 0)
    asked = int(total * host_pool.fraction) if isinstance(host_pool, Share) else host_pool
    said = f"{shown(asked)} ({SizeOrShare().show(host_pool)})" if isinstance(host_pool, Share) else shown(asked)
    if asked > spare:
        percent, mib = 100 * spare // total if total else 0, spare >> 20
        works = f"{percent}% or {mib}MiB" if isinstance(host_pool, Share) and percent else f"{mib}MiB"
        advice = f"give {works} or less" if (mib << 20) >= block else "leave it out"
        raise SettingsError([f"--host-pool: {said} do not fit, {shown(spare)} are spare; {advice}"])
    if isinstance(host_pool, Share) and asked < block:
        raise SettingsError([f"--host-pool: {said} holds no block; give a larger share, or {block} or more, or 0"])
    if 0 < asked < block:
        raise SettingsError([f"--host-pool: {said} holds no block; give {block} or more, or 0 for none"])
    return asked // block
