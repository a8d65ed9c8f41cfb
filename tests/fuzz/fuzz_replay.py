"""Parse the bytes of one case again: python tests/fuzz/fuzz_replay.py PARSER HEX

With a number in the place of HEX and a seed after it, the case is made anew: fuzz_replay.py PARSER 17 1
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "core")]

from fuzz_corpus import targets  # noqa: E402
from fuzz_engine import run_one  # noqa: E402


def main(arguments: list[str]) -> int:
    known = targets()
    if not 2 <= len(arguments) <= 3 or arguments[0] not in known:
        print(f"{__doc__}\nparsers: {', '.join(sorted(known))}")
        return 2
    target = known[arguments[0]]
    if len(arguments) == 3:
        data = target.make(Random(f"{target.name}/{arguments[2]}/{arguments[1]}"))
        print(data.hex())
    else:
        data = bytes.fromhex(arguments[1])
    print("accepted" if run_one(target, data, "replayed", measure=True) else "refused, as documented")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
