"""Which features does an objective suppress? (GCL, section 3)"""
