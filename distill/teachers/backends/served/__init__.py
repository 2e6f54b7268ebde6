"""Remote teachers: the wire protocol, the clients of servers, and the teacher that queries them."""
