"""Online caching: a teacher's outputs are stored when they are first computed, and read from then on."""
