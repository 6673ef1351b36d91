"""Imports user code by path, ``package.module:attribute``."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from typing import Any

from rlhpc.core import env
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.storage import kind_of


def import_attribute(path: str, where: str) -> Any:
    """Object named by ``path``: an attribute of a module, or of a class in it. ``where``: the config key with the path.

    The working folder is searched too, as for ``python -m``: a reward in its ``my_rewards.py`` is
    ``my_rewards:score``. In a container, so are the folders of RLHPC_CODE.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute or module_name[:1] in ("", "."):
        raise UserError(f"{path!r} is not an import path", where=where, remedy="write it as package.module:function")
    _search_own_code()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"cannot import {module_name!r} ({error})", where=where, remedy="install it or correct the path"
        ) from error
    except (Exception, SystemExit) as error:  # the module is a user's: it may fail in any way
        if isinstance(error, OSError) and kind_of(error) != "permanent":
            raise
        raise UserError(
            f"{module_name!r} fails when imported ({_place_of(error)}{type(error).__name__}: {str(error)[:200]})",
            where=where,
            remedy="correct the module",
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UserError(
            f"{module_name!r} has no {attribute!r}", where=where, remedy=did_you_mean(attribute, public)
        ) from None


def _search_own_code() -> None:
    """Puts the working folder into the module search path, and the folders of RLHPC_CODE behind it."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    behind = next(number for number, folder in enumerate(sys.path, 1) if folder in ("", here))
    code = os.environ.get(env.RLHPC_CODE, "").split(os.pathsep)
    sys.path[behind:behind] = [folder for folder in code if folder and folder != here and folder not in sys.path]


def _place_of(error: BaseException) -> str:
    """File and line where an import failed, as ``file:line: ``; empty if it is not known."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: " if error.filename and error.lineno else ""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if not frame.filename.startswith("<")), None)
    return f"{place.filename}:{place.lineno}: " if place is not None and place.filename != __file__ else ""
