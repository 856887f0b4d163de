#!/bin/bash
sed -i 's/prices\[1:\]/prices/' /app/prices.py
