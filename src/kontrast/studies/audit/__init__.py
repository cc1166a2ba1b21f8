"""`kontrast audit`: which features does an objective suppress? (GCL, section 3)"""
