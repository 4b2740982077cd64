"""Reads what nvcc and nvdisasm say about kernels: resources, instructions, loops."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field

LABEL = re.compile(r"^(\.L_x_\d+|\.L_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);?\s*$")
TARGET = re.compile(r"`\((\.L_x_\d+|\.L_\d+)\)")
RESOURCES = re.compile(
    r"Compiling entry function '(\S+)' for '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass
class Instruction:
    address: int
    predicate: str | None
    name: str
    operands: str


@dataclass
class Access:
    """What kind of memory an instruction reaches, in which direction, and how many bytes per thread."""

    space: str  # global, generic, local
    store: bool
    bytes: int


@dataclass
class Loop:
    """A loop that holds no other, and its accesses to device memory: {bytes per thread: instructions}."""

    address: int
    instructions: int
    loads: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    streaming_stores: int = 0  # of these: with the hint "evict first"


@dataclass
class Kernel:
    symbol: str
    name: str  # demangled and shortened
    arch: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    accesses: Counter = field(default_factory=Counter)  # (space, store): instructions
    loops: list[Loop] = field(default_factory=list)


def demangled(symbols: list[str]) -> list[str]:
    """Names as they stand in the source, without namespaces and parameters."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    names = []
    for line in done.stdout.splitlines():
        line = line.replace("(anonymous namespace)::", "").replace("fastaccum::", "").replace("gpu::", "")
        line = re.sub(r"\((?:anonymous namespace|int|Norm|bool)\)", "", line.removeprefix("void "))
        names.append(line.partition("(")[0].replace(" >", ">"))
    return names


def access_of(instruction: Instruction) -> Access | None:
    """The memory access that an instruction is, if any; shared and constant memory do not count."""
    head, *parts = instruction.name.split(".")
    kinds = {"LDG": ("global", False), "STG": ("global", True), "LD": ("generic", False)}
    kinds |= {"ST": ("generic", True), "LDL": ("local", False), "STL": ("local", True)}
    kinds |= {"LDGSTS": ("global", False), "RED": ("global", True), "ATOMG": ("global", True)}
    if head not in kinds:
        return None
    size = 4
    for part in parts:
        if part in ("64", "128", "256"):
            size = int(part) // 8
        elif part in ("U8", "S8"):
            size = 1
        elif part in ("U16", "S16"):
            size = 2
    return Access(*kinds[head], size)


def listings(text: str) -> dict[str, list[Instruction | str]]:
    """Splits nvdisasm's output: {symbol: its instructions and labels}."""
    kernels: dict[str, list[Instruction | str]] = {}
    current: list[Instruction | str] | None = None
    for line in text.splitlines():
        if line.startswith("//---"):
            section = re.search(r"\.text\.(\S+)", line)
            current = kernels.setdefault(section[1], []) if section else None
        elif current is None:
            continue
        elif label := LABEL.match(line):
            current.append(label[1])
        elif code := INSTRUCTION.match(line):
            current.append(Instruction(int(code[1], 16), code[2], code[3], code[4]))
    return kernels


def blocks_of(listing: list[Instruction | str]) -> tuple[list[list[Instruction]], list[set[int]]]:
    """Basic blocks and their successors."""
    blocks: list[list[Instruction]] = [[]]
    start: dict[str, int] = {}
    for item in listing:
        if isinstance(item, str):
            if blocks[-1]:
                blocks.append([])
            start[item] = len(blocks) - 1
        else:
            blocks[-1].append(item)
            if item.name.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "EXIT", "RET", "BSYNC", "BREAK"):
                blocks.append([])
    # BSYNC goes to where the threads of its BSSY meet: to the next instruction, or out of line.
    meeting: dict[str, set[int]] = {}
    for item in listing:
        if isinstance(item, Instruction) and item.name.startswith("BSSY"):
            target = TARGET.search(item.operands)
            if target and target[1] in start:
                meeting.setdefault(item.operands.split(",")[0].strip(), set()).add(start[target[1]])
    successors: list[set[int]] = []
    for i, block in enumerate(blocks):
        nexts: set[int] = set()
        last = block[-1] if block else None
        head = last.name.split(".")[0] if last else ""
        falls = True
        if last and head in ("BRA", "JMP"):
            nexts |= {start[t] for t in TARGET.findall(last.operands) if t in start}
            # `@P0 BRA` and `BRA P0, x`: a condition; then the next block may follow.
            conditional = last.predicate or re.match(r"!?U?P\d", last.operands) or "DIV" in last.name
            falls = bool(conditional)
        elif last and head in ("BRX", "JMX"):
            nexts |= {start[t] for t in re.findall(r"\.L_x_\d+", last.operands) if t in start}
            falls = False
        elif last and head in ("EXIT", "RET"):
            falls = bool(last.predicate)
        elif last and head == "BSYNC":
            targets = meeting.get(last.operands.strip(), set())
            if i + 1 not in targets:
                nexts |= targets
        if falls and i + 1 < len(blocks):
            nexts.add(i + 1)
        successors.append(nexts)
    return blocks, successors


def innermost_loops(successors: list[set[int]]) -> list[tuple[int, set[int]]]:
    """The natural loops that hold no other: (header, blocks)."""
    n = len(successors)
    predecessors: list[set[int]] = [set() for _ in range(n)]
    for i, nexts in enumerate(successors):
        for j in nexts:
            predecessors[j].add(i)
    order, seen = [], {0}
    stack = [(0, iter(sorted(successors[0])))]
    while stack:
        node, nexts = stack[-1]
        for j in nexts:
            if j not in seen:
                seen.add(j)
                stack.append((j, iter(sorted(successors[j]))))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    rank = {node: k for k, node in enumerate(order)}
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            new = None
            for p in predecessors[node]:
                if p not in dominator:
                    continue
                if new is None:
                    new = p
                    continue
                a, b = p, new
                while a != b:
                    while rank[a] > rank[b]:
                        a = dominator[a]
                    while rank[b] > rank[a]:
                        b = dominator[b]
                new = a
            if new is not None and dominator.get(node) != new:
                dominator[node] = new
                changed = True

    def dominates(a: int, b: int) -> bool:
        while rank[b] > rank[a]:
            b = dominator[b]
        return a == b

    loops: dict[int, set[int]] = {}
    for node in order:
        for header in successors[node]:
            if header in rank and dominates(header, node):
                body, todo = loops.setdefault(header, {header}), [node]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo += [p for p in predecessors[block] if p in rank]
    return [
        (header, body)
        for header, body in sorted(loops.items())
        if not any(other != header and other in body for other in loops)
    ]


def kernels_of(ptxas: str, sass: str) -> list[Kernel]:
    """Joins ptxas's report (-Xptxas -v) with nvdisasm's listing of the same cubin."""
    found = {m[1]: m for m in RESOURCES.finditer(ptxas)}
    kernels = []
    for (symbol, listing), name in zip(
        (parts := listings(sass)).items(), demangled(list(parts)), strict=True
    ):
        if symbol not in found:
            continue
        m = found[symbol]
        shared = re.search(r"(\d+) bytes smem", m[7])
        kernel = Kernel(symbol, name, m[2], int(m[6]), int(m[3]), int(m[4]) + int(m[5]))
        kernel.shared = int(shared[1]) if shared else 0
        for item in listing:
            if isinstance(item, Instruction) and (access := access_of(item)):
                kernel.accesses[access.space, access.store] += 1
        blocks, successors = blocks_of(listing)
        for header, body in innermost_loops(successors):
            instructions = [item for block in body for item in blocks[block]]
            loop = Loop(blocks[header][0].address if blocks[header] else 0, len(instructions))
            for item in instructions:
                access = access_of(item)
                if access and access.space != "local":
                    (loop.stores if access.store else loop.loads)[access.bytes] += 1
                    loop.streaming_stores += access.store and ".EF" in item.name
            if loop.loads or loop.stores:
                kernel.loops.append(loop)
        kernels.append(kernel)
    missing = set(found) - {kernel.symbol for kernel in kernels}
    if missing:
        raise RuntimeError(f"nvdisasm lists no code of {sorted(missing)}")
    return kernels
