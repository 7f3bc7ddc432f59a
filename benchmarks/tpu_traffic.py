"""What a chip of a TPU slice sends in one run of a compiled program, read from the program's text."""

import collections
import dataclasses
import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.-]+)")
_WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass
class _Computation:
    """The lines of a computation by the names of their results, and the name of its own result."""

    lines: dict[str, str] = dataclasses.field(default_factory=dict)
    root: str = ""

    def constant(self, name: str) -> int | None:
        found = re.search(r" constant\((\d+)\)", self.lines.get(name, ""))
        return int(found[1]) if found else None

    def operands(self, name: str) -> list[str]:
        """Names of what an instruction takes."""
        found = re.search(r" [\w-]+\((%[^()]*)\)", self.lines.get(name, ""))
        return re.findall(r"%([\w.-]+)", found[1]) if found else []


def traffic(program: str) -> dict[str, int]:
    """Bytes that a chip sends or receives in one run of a compiled program, by kind of collective.

    Each is computed as on a ring of n chips: of the result of an all-gather or the input of a reduce-scatter the share
    (n - 1) / n, of an all-reduce twice that. What is in a loop counts as often as the loop runs. The compiler repeats a
    collective in the parts that start, advance and finish it; they have one channel and count once.

    Raises ValueError for a loop that sends, of which the number of turns is not found.
    """
    computations, entry = _parsed(program)
    times: dict[str, int] = collections.Counter()

    def call(name: str, count: int) -> None:
        times[name] += count
        for line in computations[name].lines.values():
            loop = _WHILE.search(line)
            turns = 1 if loop is None else _turns(line, computations, *loop.groups())
            for called in _CALLED.findall(line):
                if called in computations:
                    call(called, count * turns)

    call(entry, 1)
    sent: dict[tuple[str, str], int] = {}
    for name, count in times.items():
        for instruction, line in computations[name].lines.items():
            if found := _COLLECTIVE.search(line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = found[1], channel[1] if channel else instruction
                sent[key] = max(sent.get(key, 0), count * _sent(found[1], line, bool(found[2])))
    totals: dict[str, int] = collections.Counter()
    for (kind, _), size in sent.items():
        totals[kind] += size
    return dict(totals)


def _parsed(program: str) -> tuple[dict[str, _Computation], str]:
    """The computations by name, and the name of the one that the program starts with."""
    computations: dict[str, _Computation] = {}
    entry = name = ""
    for line in program.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            entry = name if start[1] else entry
            computations[name] = _Computation()
        elif name and (instruction := _INSTRUCTION.match(line)):
            computations[name].lines[instruction[2]] = line
            if instruction[1]:
                computations[name].root = instruction[2]
    return computations, entry


def _turns(line: str, computations: dict[str, _Computation], condition: str, body: str) -> int:
    """How often a loop runs: as it says, or as its counter, which begins at 0, takes to the limit of its condition."""
    if known := _TRIPS.search(line):
        return int(known[1])
    test, block = computations[condition], computations[body]
    counter, limit = ([*test.operands(test.root), "", ""])[:2]
    index = re.search(r"index=(\d+)", test.lines.get(counter, ""))
    following = block.operands(block.root)
    most = test.constant(limit) if "direction=LT" in test.lines.get(test.root, "") else None
    if index and most is not None and int(index[1]) < len(following):
        steps = [block.constant(part) for part in block.operands(following[int(index[1])])]
        if found := [step for step in steps if step]:
            return -(-most // found[0])
    if _sends(computations, body):
        raise ValueError(f"How often the loop {body} runs is not found; read its condition {condition}.")
    return 1


def _sends(computations: dict[str, _Computation], name: str) -> bool:
    """Whether a computation or one that it calls has a collective."""
    lines = computations[name].lines.values()
    called = {part for line in lines for part in _CALLED.findall(line) if part in computations}
    return any(map(_COLLECTIVE.search, lines)) or any(_sends(computations, part) for part in called)


def _sent(kind: str, line: str, is_start: bool) -> int:
    """Bytes of one collective."""
    result = line.split("=", 1)[1].split(f" {kind}", 1)[0]
    sizes = [_bytes(*array) for array in _ARRAY.findall(result)]
    # The result of an asynchronous one holds the operand, too.
    size = max(sizes) if is_start else sum(sizes)
    if kind == "collective-permute":
        return size
    group = _group_size(line)
    if kind == "reduce-scatter":
        size *= group
    return size * (group - 1) // group * (2 if kind == "all-reduce" else 1)


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def _group_size(line: str) -> int:
    """Chips that take part: {{0,1},{2,3}}, [groups, size]<=[...], or the axes of a mesh that are named behind it."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(groups[1].split(",")) if groups else 1
