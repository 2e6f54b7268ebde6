"""`distill serve`: a teacher server over HTTP for remote trainers. Protocol: `teachers.backends.served.protocol`."""
