"""`distill doctor`: measures invariants that training relies on, and checks the machine."""
