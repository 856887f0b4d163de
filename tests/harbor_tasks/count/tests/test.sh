#!/usr/bin/env bash
right=$(grep -c ERROR /data/log.txt)
[ "$(cat answer.txt)" = "$right" ] && reward=1.0 || reward=0.25
echo "{\"reward\": $reward, \"lines\": $right}" > /logs/verifier/reward.json
