"""The few places where Megatron is touched, each undoable, each naming symbol and version."""
