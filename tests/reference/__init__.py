"""Dense references: slow, explicit and written from the formulas alone, for the fast code to be compared with."""
