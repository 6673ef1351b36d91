"""What a site runs once on a machine: acceptance of GPUs, and wheels for machines without network."""
