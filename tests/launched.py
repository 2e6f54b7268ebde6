"""Stand-ins for what launch plans call."""


class Native:
    """Stands for the C function of Triton: `started` holds grid and arguments of each call."""

    def __init__(self):
        self.started = []

    def __call__(self, *handed):
        grid, common, rest = handed[:3], handed[3:7], list(handed[7:])
        assert common == (7, 7, False, False)  # stream, function, cooperative, dependent
        before_metadata = rest.index((4, 1, 0))
        if before_metadata == 0:
            assert rest[1:6] == [None] * 5
            arguments = rest[-1]
        else:  # Triton 3.5: two scratch buffers before the metadata, then launch metadata, two hooks and each argument
            assert before_metadata == 2 and rest[:2] + rest[3:6] == [None] * 5
            arguments = rest[6:]
        self.started.append((grid, tuple(arguments)))
