"""What builds and checks the documentation and the wheel."""
