"""Keys of the job's store that launcher and ranks both use."""

from __future__ import annotations

BOARD = "board"  # name of the board that all ranks have in common (rlhpc.parallel.board)
LOST_ENGINES = "lost_engines"  # on it: by engine, the generation that the trainers have given up last
BEGIN = "begin"  # on it: RL begins (rlhpc.trainer.handshake)
TRAINERS = "trainers"  # on no board: the trainers' present start, once they were started again (TrainersStart)
