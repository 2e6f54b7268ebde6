"""`distill serve`: a teacher server over HTTP for remote trainers. The protocol is `distill.teachers.server.wire`."""
