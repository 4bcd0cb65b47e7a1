"""What all ranks do together: requests, votes and the decision."""
