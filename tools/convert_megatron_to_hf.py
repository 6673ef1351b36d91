"""``rlhpc convert megatron-to-hf`` as a script: python tools/convert_megatron_to_hf.py SRC DST [OPTIONS]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhpc.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "megatron-to-hf"]
    main()
