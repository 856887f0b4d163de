grep -c ERROR /data/log.txt > answer.txt
