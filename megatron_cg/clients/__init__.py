"""What clients of Megatron need besides: Megatron-Bridge."""
