"""`dpopt report`: one HTML page of a suite that opens without a network."""
