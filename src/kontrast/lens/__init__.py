"""What a representation is: maps, neighbours and numbers of frozen features."""
