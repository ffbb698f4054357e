"""What a receipt is: its bytes, digest, parents, signature, chain, verification and gates. Pure: bytes in, values out."""
