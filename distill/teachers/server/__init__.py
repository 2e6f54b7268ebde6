"""A teacher in another process: what is asked of it and answered, the servers, and the kind of teacher."""
