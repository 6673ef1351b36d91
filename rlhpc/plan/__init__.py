"""`rlhpc plan`: scenarios, search over layouts, calibration, remedies. Torch-free.

`checks` refuses what cannot work, `estimates` predicts memory and time; all commands use both.
"""
