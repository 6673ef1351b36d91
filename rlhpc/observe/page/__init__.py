"""The page of runs: one HTML file with curves, timeline, events, placement, prediction, samples and configuration.

It opens by double click, without server and network. All of it is read from run folders, without torch and numpy: a
login node can write it, and the page of a crashed run as well. ``document.py`` is the entry.

- ``collect.py`` reads a run folder; ``numbers.py``, ``marks.py``, ``tables.py`` and ``texts.py`` each make a part of
  the page's data, with a bound in size.
- ``numbers.py`` packs all numbers into one gzip stream of float32 byte planes, and all texts into one of JSON. The page
  has both as base64, so that no text of a model or a user is ever markup.
- ``document.py`` joins them with the scripts and styles in ``assets``. The content security policy allows exactly these
  by their hashes, and no request. Scripts write texts through ``textContent`` only.

``assets/uplot`` is uPlot 1.6.32 (MIT), unchanged from its npm package.
"""
