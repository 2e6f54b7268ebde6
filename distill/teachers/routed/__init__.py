"""Per-domain teachers with routing: each row has its own teacher."""
