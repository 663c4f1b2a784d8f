"""What we are measured against, written as its users would write it, in its fastest honest form."""
