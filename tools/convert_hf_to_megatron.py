"""``rlhpc convert hf-to-megatron`` as a script: python tools/convert_hf_to_megatron.py SRC DST [OPTIONS]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhpc.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-megatron"]
    main()
