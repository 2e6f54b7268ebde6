"""`distill serve`: a teacher over HTTP, for trainers elsewhere. The wire is `distill.teachers.server.wire`."""
