"""Programs that keep the documentation current; not part of the package."""
