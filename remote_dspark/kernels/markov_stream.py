"""The Markov product of one tile as the uncached head computes it: half a vocabulary row under way while it works.

Sixteen threads own a column, each two neighbouring lanes of it, so that W1 rows of four requests and 128 KB of W2 per
program fit the registers. The order of additions is that of `markov_product` (32 lanes in ascending order, then a tree
of neighbours), so a row computed here and a cached one are the same bits.

The tree is the point of this file: 16 sums of a thread are exchanged so that each thread of a column ends up with one
of them, in 15 exchanges instead of 64. That needs to know which thread holds what, hence BLOCK, two columns a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.markov_product import LANES, stack
from remote_dspark.kernels.selection import HAS_ASSEMBLY

WIDTH = tl.constexpr(16)
"""Threads of a column, and sums that they exchange at a time."""


def _exchange_assembly() -> str:
    """PTX: 16 inputs per thread, one output; thread t of 16 gets the sum over all 16 threads of input t.

    Halves are exchanged with the neighbour at distance 1, 2, 4 and 8: a tree of neighbours for every input.
    """
    lines = [".reg .pred p; .reg .b32 lane; .reg .f32 keep, send, got;", "mov.u32 lane, %laneid;"]
    names = [f"${index + 1}" for index in range(16)]
    for level in range(4):
        lines += [
            f".reg .b32 bit{level};",
            f"and.b32 bit{level}, lane, {1 << level};",
            f"setp.ne.s32 p, bit{level}, 0;",
        ]
        following = []
        for pair in range(len(names) // 2):
            low, high = names[2 * pair], names[2 * pair + 1]
            out = "$0" if level == 3 else f"v{level}_{pair}"
            if level < 3:
                lines.append(f".reg .f32 {out};")
            lines += [
                f"selp.f32 keep, {high}, {low}, p;",
                f"selp.f32 send, {low}, {high}, p;",
                f"shfl.sync.bfly.b32 got, send, {1 << level}, 31, -1;",
                f"add.rn.f32 {out}, keep, got;",
            ]
            following.append(out)
        names = following
    return "{ " + " ".join(lines) + " }"


EXCHANGE = tl.constexpr(_exchange_assembly())
_CONSTRAINTS = tl.constexpr("=f" + ",f" * 16)


EIGHT_LOADS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $9, 0;"
    + "".join(f" @p ld.global.nc.L1::no_allocate.b32 ${step}, [$8 + {64 * step}];" for step in range(8))
    + " }"
)
EIGHT_WORDS = tl.constexpr((tl.int32,) * 8)


@triton.jit
def _two_lanes(words):
    """Two neighbouring BF16 lanes of int32 words as float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load_steps(line, wanted, RANK: tl.constexpr):
    """A row's words for each step of 32 lanes, from pointers to those of the first: a tuple of int32 tensors.

    Nothing in particular where not ``wanted``, which is 0 or not.

    Where the rank is the usual one, all steps are one piece of assembly: the compiler's time grows with the square of
    the loads it sees, and these stay where they are written, between the products.
    """
    if HAS_ASSEMBLY and RANK == 256:
        steps = tl.inline_asm_elementwise(
            EIGHT_LOADS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
            [line.to(tl.int64), wanted],
            dtype=EIGHT_WORDS,
            is_pure=False,
            pack=1,
        )
    else:
        steps = ()
        for step in tl.static_range(RANK // LANES):
            steps += (tl.load(line + step * WIDTH),)
    return steps


@triton.jit
def load_requests(w1_ptr, tokens, R: tl.constexpr, RANK: tl.constexpr):
    """The W1 rows of R tokens: a tuple of float32 [1, 16], by row, step of 32 and lane of a word."""
    words = w1_ptr.to(tl.pointer_type(tl.int32))
    found = ()
    for row in tl.static_range(R):
        line = words + tokens[row].to(tl.int64) * (RANK // 2) + tl.arange(0, WIDTH)
        steps = _load_steps(line[None, :], tokens[row] * 0 + 1, RANK)
        for step in tl.static_range(RANK // LANES):
            found += _two_lanes(steps[step])
    return found


@triton.jit
def load_columns(w2_ptr, first, end, wanted, BLOCK: tl.constexpr, RANK: tl.constexpr):
    """W2 of BLOCK columns, int32 [BLOCK, 16] for each step of 32 lanes. From ``end`` on the last column again."""
    columns = tl.minimum(first + tl.arange(0, BLOCK), end - 1)
    words = w2_ptr.to(tl.pointer_type(tl.int32))
    line = words + columns.to(tl.int64)[:, None] * (RANK // 2) + tl.arange(0, WIDTH)[None, :]
    return _load_steps(line, wanted, RANK)


@triton.jit
def load_ahead(w2_ptr, first, end, SUB: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr):
    """W2 of SUB columns for `stream_products`; it depends on no token."""
    loaded = ()
    for block in tl.static_range(SUB // BLOCK):
        loaded += load_columns(w2_ptr, first + block * BLOCK, end, first * 0 + 1, BLOCK, RANK)
    return loaded


@triton.jit
def _two_lane_sums(steps, w1, R: tl.constexpr, RANK: tl.constexpr):
    """Sums of each thread's two lanes with R rows: a tuple of R float32 [BLOCK, 16]."""
    STEPS: tl.constexpr = RANK // LANES
    sums = ()
    for _ in tl.static_range(2 * R):
        sums += (tl.zeros(steps[0].shape, tl.float32),)  # type: ignore[assignment]
    for step in tl.static_range(STEPS):
        w2 = _two_lanes(steps[step])
        following = ()
        for row in tl.static_range(R):
            for lane in tl.static_range(2):
                following += (sums[2 * row + lane] + w2[lane] * w1[(row * STEPS + step) * 2 + lane],)  # type: ignore[assignment]
        sums = following
    found = ()
    for row in tl.static_range(R):
        found += (sums[2 * row] + sums[2 * row + 1],)  # type: ignore[assignment]
    return found


@triton.jit
def _tree(sums, BLOCK: tl.constexpr):
    """Sums 16 threads of each column as a tree of neighbours: float32 [BLOCK, 1]."""
    for half in tl.static_range(4):
        sums = tl.sum(tl.reshape(sums, [BLOCK, WIDTH >> (half + 1), 2]), axis=2)
    return tl.reshape(sums, [BLOCK, 1])


@triton.jit
def exchange(sums, BLOCK: tl.constexpr):
    """From a tuple of 16 float32 [BLOCK, 16], one such tensor: at (c, t) the tree sum of ``sums[t]`` at column c."""
    if HAS_ASSEMBLY:
        found = tl.inline_asm_elementwise(EXCHANGE, _CONSTRAINTS, sums, dtype=tl.float32, is_pure=False, pack=1)
    else:
        found = tl.zeros([BLOCK, WIDTH], tl.float32)
        for index in tl.static_range(WIDTH):
            found = tl.where((tl.arange(0, WIDTH) == index)[None, :], _tree(sums[index], BLOCK), found)
    return found


@triton.jit
def ask_lines(pointers):
    """Asks for the 128 bytes at each pointer in L2; a hint without a result. CUDA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_columns(w2_ptr, first, end, COLUMNS: tl.constexpr, RANK: tl.constexpr):
    """Asks for columns of W2 in L2, from ``end`` on for the last one again."""
    LINES: tl.constexpr = RANK // 64
    line = tl.arange(0, COLUMNS * LINES)
    column = tl.minimum(first + line // LINES, end - 1)
    ask_lines(w2_ptr + column.to(tl.int64) * RANK + line % LINES * 64)


@triton.constexpr_function
def turns_of(sub, block, rows):
    """Blocks of columns whose sums are exchanged together: as many as give a thread 16 sums."""
    return min(16 // rows, sub // block)


@triton.constexpr_function
def products_size(tile, sub, block, rows):
    """Elements of `stream_products`: more than tile * rows where a part has too few columns for 16 sums."""
    return tile // sub * block * 16 * (sub // (block * turns_of(sub, block, rows)))


@triton.jit
def stream_products(
    ahead,
    w2_ptr,
    w1,
    base,
    end,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Products of one tile for R = 1, 2 or 4 rows, before rounding, float32 in the order of `stream_index`.

    ``ahead`` is `load_ahead` at ``base``, ``w1`` is `load_requests`. As soon as a block of columns is used, its
    registers take the loads of the same block of the next part. ``end`` must not lie beyond the tile.
    """
    STEPS: tl.constexpr = RANK // LANES
    TURNS: tl.constexpr = turns_of(SUB, BLOCK, R)
    GROUPS: tl.constexpr = SUB // (BLOCK * TURNS)
    PARTS: tl.constexpr = TILE // SUB
    products = tl.zeros([PARTS, BLOCK * WIDTH * GROUPS], tl.float32)
    for part in tl.range(0, PARTS, num_stages=1):
        more = PARTS - 1 - part
        following = ()
        groups = ()
        for group in tl.static_range(GROUPS):
            sums = ()
            for turn in tl.static_range(TURNS):
                # spelled out: a name would make it a run-time value
                steps = ahead[(group * TURNS + turn) * STEPS : (group * TURNS + turn + 1) * STEPS]
                sums += _two_lane_sums(steps, w1, R, RANK)
                first = base + (part + 1) * SUB + (group * TURNS + turn) * BLOCK
                following += load_columns(w2_ptr, first, end, more, BLOCK, RANK)
            for _ in tl.static_range(WIDTH - TURNS * R):
                sums += (sums[0],)  # type: ignore[assignment,misc]
            groups += (exchange(sums, BLOCK),)  # type: ignore[assignment]
        ahead = following
        # a gather by position is the one operation whose result may lie in any layout
        found = tl.reshape(stack(groups, GROUPS), [BLOCK * WIDTH * GROUPS])
        found = tl.gather(found, tl.arange(0, BLOCK * WIDTH * GROUPS), 0)
        products = tl.where((tl.arange(0, PARTS) == part)[:, None], found[None, :], products)
    return tl.reshape(products, [products_size(TILE, SUB, BLOCK, R)])


@triton.jit
def stream_index(columns, row, SUB: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """Where `stream_products` puts columns of a row."""
    TURNS: tl.constexpr = turns_of(SUB, BLOCK, R)
    GROUPS: tl.constexpr = SUB // (BLOCK * TURNS)
    inside = columns % SUB
    thread = inside // BLOCK % TURNS * R + row
    place = (inside % BLOCK * WIDTH + thread) * GROUPS + inside // (BLOCK * TURNS)
    return columns // SUB * (BLOCK * WIDTH * GROUPS) + place
