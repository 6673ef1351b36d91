"""Operations that back ends share, each with its own backward pass: it saves little, and few kernels run."""
