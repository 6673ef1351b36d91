"""Tools a site runs once per machine: acceptance of GPUs, and wheels for machines without network."""
