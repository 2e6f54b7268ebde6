"""A teacher on ranks of its own (`parallel.teacher: ranks`): the way to it, and what the ranks that train see of it."""
